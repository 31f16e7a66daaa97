/* What Python reads of the kernels as a whole: the operations of elementwise programs, and what the processor has for
   products. */
#include "integers.h"
#include "numpy_api.h"
#include "programs.h"
#include "vectors.h"

static PyObject *names_of_operations(PyObject *module, PyObject *none)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names && elementwise_operations[i]; i++) {
        PyObject *name = PyUnicode_FromString(elementwise_operations[i]);
        if (!name || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* Approximate: a multiplication and an addition are two operations, of products of many rows. On aarch64, they follow
   from the width of the instructions. */
static PyObject *integer_products(PyObject *module, PyObject *none)
{
#ifdef HAVE_TILES
    if (product_for(TILE) == tiles)
        return Py_BuildValue("is", 1000, "AMX");
#endif
#if defined(__AVX2__)
    return product_for(TILE) == vnni ? Py_BuildValue("is", 250, "VNNI") : Py_BuildValue("is", 130, "");
#elif defined(DOTS)
    if (product_for(TILE) != plain)
        return product_for(TILE) == vnni ? Py_BuildValue("is", 200, "i8mm") : Py_BuildValue("is", 80, "dotprod");
#endif
    return Py_BuildValue("is", 40, "");
}

static PyObject *multiplies_bfloat16(PyObject *module, PyObject *none)
{
    return PyBool_FromLong(BY_WIDTH((features & AVX512_BF16) != 0, 0, 0));
}

PyMethodDef library_functions[] = {
    {"elementwise_operations", names_of_operations, METH_NOARGS, "the names of operations of elementwise programs."},
    {"integer_products", integer_products, METH_NOARGS,
     "the operations per nanosecond of products of integers, and the name of the instructions; \"\" for usual ones."},
    {"multiplies_bfloat16", multiplies_bfloat16, METH_NOARGS, "whether the processor multiplies bfloat16."},
    {NULL, NULL, 0, NULL},
};
