/* Geometry of images, for convolutions and transposed convolutions. */
#ifndef PENSTOCK_IMAGES_H
#define PENSTOCK_IMAGES_H

#include <stdint.h>

/* An axis: the sizes of the image and of the result, and its windows. */
typedef struct {
    int64_t size, count, kernel, stride, dilation, begin;
} axis;

/* Elements between adjacent images, channels, rows, columns and slices. */
typedef struct {
    int64_t image, channel, row, column, slice;
} steps;

#endif
