/* CRC-32C, the checksum of TensorFlow's checkpoints and of saved sessions: see host/crc32c.py. */
#include "numpy_api.h"
#include <string.h>

#if defined(__SSE4_2__) && defined(__x86_64__)
#include <nmmintrin.h>
#define OF_BYTE _mm_crc32_u8
#define OF_WORD (uint32_t)_mm_crc32_u64
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define OF_BYTE __crc32cb
#define OF_WORD __crc32cd
#else
/* The remainders of four bits, the lowest of which has the highest power. */
static const uint32_t table[16] = {
    0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1, 0x417B1DBC, 0x5125DAD3, 0x61C69362, 0x7198540D,
    0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9, 0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75};

static uint32_t OF_BYTE(uint32_t sum, uint8_t byte)
{
    sum = table[(sum ^ byte) & 15] ^ sum >> 4;
    return table[(sum ^ byte >> 4) & 15] ^ sum >> 4;
}
#endif

static PyObject *crc32c(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer data;
    uint32_t sum = count == 2 ? ~(uint32_t)PyLong_AsUnsignedLong(arguments[1]) : 0;
    if (count != 2 || PyErr_Occurred() || PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE) < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "crc32c() takes bytes and a sum");
    const char *at = data.buf, *end = at + data.len;
    PyThreadState *state = PyEval_SaveThread();
#ifdef OF_WORD
    for (uint64_t word; end - at >= 8; at += 8)
        sum = OF_WORD(sum, (memcpy(&word, at, 8), word));
#endif
    for (; at < end; at++)
        sum = OF_BYTE(sum, (uint8_t)*at);
    PyEval_RestoreThread(state);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong((uint32_t)~sum);
}

PyMethodDef crc32c_functions[] = {
    {"crc32c", FAST(crc32c), "crc32c(data, sum): the checksum of bytes that follow others with a sum."},
    {NULL, NULL, 0, NULL},
};
