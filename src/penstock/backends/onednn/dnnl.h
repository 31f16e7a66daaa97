// What Penstock uses of oneDNN's C API, version 3, whose ABI does not change. Names and values are
// those of oneDNN's headers (dnnl.h, dnnl_types.h). After a change here, run
// python -m penstock.backends.onednn.declarations

typedef int64_t dnnl_dim_t;
typedef int dnnl_status_t;

typedef struct dnnl_engine *dnnl_engine_t;
typedef struct dnnl_stream *dnnl_stream_t;
typedef struct dnnl_memory_desc *dnnl_memory_desc_t;
typedef struct dnnl_memory *dnnl_memory_t;
typedef struct dnnl_primitive_desc *dnnl_primitive_desc_t;
typedef struct dnnl_primitive *dnnl_primitive_t;
typedef struct dnnl_primitive_attr *dnnl_primitive_attr_t;
typedef struct dnnl_post_ops *dnnl_post_ops_t;

typedef struct { int arg; dnnl_memory_t memory; } dnnl_exec_arg_t;
typedef struct {
    int major;
    int minor;
    int patch;
    const char *hash;
    unsigned cpu_runtime;
    unsigned gpu_runtime;
} dnnl_version_t;

enum {
    dnnl_success, dnnl_out_of_memory, dnnl_invalid_arguments, dnnl_unimplemented,
    dnnl_last_impl_reached, dnnl_runtime_error, dnnl_not_required
};
enum { dnnl_any_engine, dnnl_cpu };
enum { dnnl_stream_in_order = 1 };
enum {
    dnnl_data_type_undef, dnnl_f16, dnnl_bf16, dnnl_f32, dnnl_s32, dnnl_s8, dnnl_u8, dnnl_f64
};
enum { dnnl_format_tag_any = 1 };
enum { dnnl_blocked = 2 };
enum { dnnl_forward_inference = 96 };
enum { dnnl_scratchpad_mode_library, dnnl_scratchpad_mode_user };
enum {
    dnnl_query_impl_info_str = 8, dnnl_query_strides = 14,
    dnnl_query_src_md = 129, dnnl_query_weights_md = 131, dnnl_query_dst_md = 133,
    dnnl_query_scratchpad_md = 136, dnnl_query_exec_arg_md = 255,
    dnnl_query_ndims_s32 = 256, dnnl_query_dims = 257, dnnl_query_data_type = 258,
    dnnl_query_submemory_offset_s64 = 259, dnnl_query_padded_dims = 260,
    dnnl_query_format_kind = 262, dnnl_query_inner_nblks_s32 = 263, dnnl_query_inner_blks = 264,
    dnnl_query_inner_idxs = 265
};
enum {
    dnnl_convolution_direct = 0x1, dnnl_deconvolution_direct = 0xa,
    dnnl_eltwise_relu = 0x20, dnnl_eltwise_tanh, dnnl_eltwise_elu, dnnl_eltwise_square,
    dnnl_eltwise_abs, dnnl_eltwise_sqrt, dnnl_eltwise_linear, dnnl_eltwise_soft_relu,
    dnnl_eltwise_hardsigmoid, dnnl_eltwise_logistic, dnnl_eltwise_exp, dnnl_eltwise_gelu_tanh,
    dnnl_eltwise_swish, dnnl_eltwise_log, dnnl_eltwise_clip, dnnl_eltwise_clip_v2,
    dnnl_eltwise_pow, dnnl_eltwise_gelu_erf, dnnl_eltwise_round, dnnl_eltwise_mish,
    dnnl_eltwise_hardswish,
    dnnl_lrn_across_channels = 0xaff,
    dnnl_pooling_max = 0x1ff,
    dnnl_binary_add = 0x1fff0, dnnl_binary_mul, dnnl_binary_max, dnnl_binary_min,
    dnnl_binary_div, dnnl_binary_sub
};
enum { dnnl_use_global_stats = 1, dnnl_use_scale = 2, dnnl_use_shift = 4 };

const dnnl_version_t *dnnl_version(void);
int dnnl_get_effective_cpu_isa(void);

dnnl_status_t dnnl_engine_create(dnnl_engine_t *engine, int kind, size_t index);
dnnl_status_t dnnl_stream_create(dnnl_stream_t *stream, dnnl_engine_t engine, unsigned flags);

dnnl_status_t dnnl_memory_desc_create_with_strides(
    dnnl_memory_desc_t *desc, int ndims, const dnnl_dim_t *dims, int data_type,
    const dnnl_dim_t *strides);
dnnl_status_t dnnl_memory_desc_create_with_tag(
    dnnl_memory_desc_t *desc, int ndims, const dnnl_dim_t *dims, int data_type, int tag);
dnnl_status_t dnnl_memory_desc_clone(dnnl_memory_desc_t *desc, dnnl_memory_desc_t existing);
dnnl_status_t dnnl_memory_desc_destroy(dnnl_memory_desc_t desc);
int dnnl_memory_desc_equal(dnnl_memory_desc_t a, dnnl_memory_desc_t b);
size_t dnnl_memory_desc_get_size(dnnl_memory_desc_t desc);
dnnl_status_t dnnl_memory_desc_query(dnnl_memory_desc_t desc, int what, void *result);

dnnl_status_t dnnl_memory_create(
    dnnl_memory_t *memory, dnnl_memory_desc_t desc, dnnl_engine_t engine, void *handle);
dnnl_status_t dnnl_memory_set_data_handle(dnnl_memory_t memory, void *handle);
dnnl_status_t dnnl_memory_destroy(dnnl_memory_t memory);

dnnl_status_t dnnl_primitive_attr_create(dnnl_primitive_attr_t *attr);
dnnl_status_t dnnl_primitive_attr_destroy(dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_primitive_attr_set_scratchpad_mode(dnnl_primitive_attr_t attr, int mode);
dnnl_status_t dnnl_primitive_attr_set_post_ops(
    dnnl_primitive_attr_t attr, dnnl_post_ops_t post_ops);
dnnl_status_t dnnl_primitive_attr_set_scales_mask(
    dnnl_primitive_attr_t attr, int arg, int mask);
dnnl_status_t dnnl_primitive_attr_set_zero_points_mask(
    dnnl_primitive_attr_t attr, int arg, int mask);
dnnl_status_t dnnl_post_ops_create(dnnl_post_ops_t *post_ops);
dnnl_status_t dnnl_post_ops_destroy(dnnl_post_ops_t post_ops);
dnnl_status_t dnnl_post_ops_append_eltwise(
    dnnl_post_ops_t post_ops, int alg, float alpha, float beta);
dnnl_status_t dnnl_post_ops_append_binary(
    dnnl_post_ops_t post_ops, int alg, dnnl_memory_desc_t desc);
dnnl_status_t dnnl_post_ops_append_sum(
    dnnl_post_ops_t post_ops, float scale, int32_t zero_point, int data_type);
dnnl_status_t dnnl_post_ops_append_prelu(dnnl_post_ops_t post_ops, int mask);

dnnl_status_t dnnl_primitive_desc_next_impl(dnnl_primitive_desc_t desc);
dnnl_status_t dnnl_set_primitive_cache_capacity(int capacity);
dnnl_status_t dnnl_primitive_desc_query(
    dnnl_primitive_desc_t desc, int what, int index, void *result);
dnnl_memory_desc_t dnnl_primitive_desc_query_md(
    dnnl_primitive_desc_t desc, int what, int index);
dnnl_status_t dnnl_primitive_desc_destroy(dnnl_primitive_desc_t desc);
dnnl_status_t dnnl_primitive_create(dnnl_primitive_t *primitive, dnnl_primitive_desc_t desc);
dnnl_status_t dnnl_primitive_execute(
    dnnl_primitive_t primitive, dnnl_stream_t stream, int nargs, const dnnl_exec_arg_t *args);
dnnl_status_t dnnl_primitive_destroy(dnnl_primitive_t primitive);

dnnl_status_t dnnl_convolution_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, int alg,
    dnnl_memory_desc_t src, dnnl_memory_desc_t weights, dnnl_memory_desc_t bias,
    dnnl_memory_desc_t dst, const dnnl_dim_t *strides, const dnnl_dim_t *dilates,
    const dnnl_dim_t *padding_l, const dnnl_dim_t *padding_r, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_pooling_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, int alg,
    dnnl_memory_desc_t src, dnnl_memory_desc_t dst, const dnnl_dim_t *strides,
    const dnnl_dim_t *kernel, const dnnl_dim_t *dilation, const dnnl_dim_t *padding_l,
    const dnnl_dim_t *padding_r, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_matmul_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, dnnl_memory_desc_t src,
    dnnl_memory_desc_t weights, dnnl_memory_desc_t bias, dnnl_memory_desc_t dst,
    dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_deconvolution_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, int alg,
    dnnl_memory_desc_t src, dnnl_memory_desc_t weights, dnnl_memory_desc_t bias,
    dnnl_memory_desc_t dst, const dnnl_dim_t *strides, const dnnl_dim_t *dilates,
    const dnnl_dim_t *padding_l, const dnnl_dim_t *padding_r, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_eltwise_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, int alg,
    dnnl_memory_desc_t src, dnnl_memory_desc_t dst, float alpha, float beta,
    dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_binary_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int alg, dnnl_memory_desc_t src0,
    dnnl_memory_desc_t src1, dnnl_memory_desc_t dst, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_layer_normalization_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, dnnl_memory_desc_t src,
    dnnl_memory_desc_t dst, dnnl_memory_desc_t stat, float epsilon, unsigned flags,
    dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_batch_normalization_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, dnnl_memory_desc_t src,
    dnnl_memory_desc_t dst, float epsilon, unsigned flags, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_lrn_forward_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_engine_t engine, int prop, int alg,
    dnnl_memory_desc_t src, dnnl_memory_desc_t dst, dnnl_dim_t size, float alpha, float beta,
    float k, dnnl_primitive_attr_t attr);
dnnl_status_t dnnl_reorder_primitive_desc_create(
    dnnl_primitive_desc_t *desc, dnnl_memory_desc_t src, dnnl_engine_t src_engine,
    dnnl_memory_desc_t dst, dnnl_engine_t dst_engine, dnnl_primitive_attr_t attr);

void omp_set_num_threads(int threads);
int omp_get_max_threads(void);
