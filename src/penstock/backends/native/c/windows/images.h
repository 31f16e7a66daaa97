/* Geometry of images, for convolutions and transposed convolutions. */
#ifndef PENSTOCK_IMAGES_H
#define PENSTOCK_IMAGES_H

#include <stdint.h>

/* An axis: its elements and those of the result, and the windows along it. */
typedef struct {
    int64_t size, count, kernel, stride, dilation, begin;
} axis;

/* Elements from one image, channel, row, column or slice to the next. */
typedef struct {
    int64_t image, channel, row, column, slice;
} steps;

#endif
