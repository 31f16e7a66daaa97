/* NumPy's C interface, and the functions of the extension module that take any arrays or strings. */
#ifndef PENSTOCK_NUMPY_API_H
#define PENSTOCK_NUMPY_API_H

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL penstock_numpy_api
#include <numpy/arrayobject.h>

#pragma GCC visibility push(hidden)
PyObject *array_contiguous(PyObject *module, PyObject *given);
PyObject *array_refilled(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *array_copied(PyObject *module, PyObject *given);
PyObject *array_concatenated(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *array_tiled(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *variable_read(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *variable_assign(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *feeds_taken(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *outputs_named(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *array_appended(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_attend(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_elementwise(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_expand(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_range(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_reshape(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_slice(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_product(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *late_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_are_strings(PyObject *module, PyObject *given);
PyObject *text_places(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_hashes(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_zip_map(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_tokens(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_matches(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_parts(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_padded(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *text_ngrams(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
#pragma GCC visibility pop

#endif
