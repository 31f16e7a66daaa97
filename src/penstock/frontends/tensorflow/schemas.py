"""Schemas of TensorFlow's operations: arity, names of outputs, defaults of attributes.

A line is one operation, ``Name: inputs -> outputs ; attribute=default``. ``x*N`` is a list of as
many values as attribute N says, or as it has entries if it is a list. After the colon of an output
stands its element type: the name of an attribute, by default ``T``, or a type itself. The names of
outputs matter inside functions, where ``node:name:0`` refers to one. Inputs and outputs that end in
``&`` are references to variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_TABLE = """
# Control flow
Switch: data pred -> output_false output_true
RefSwitch: data& pred -> output_false& output_true&
_SwitchN: data output_index -> outputs*num_outs
Merge: inputs*N -> output value_index:int32
RefMerge: inputs*N& -> output& value_index:int32
Enter: data -> output ; is_constant=false parallel_iterations=10
RefEnter: data& -> output& ; is_constant=false parallel_iterations=10
Exit: data -> output
RefExit: data& -> output&
NextIteration: data -> output
RefNextIteration: data& -> output&
LoopCond: input -> output:bool
ControlTrigger: ->
NoOp: ->
If: cond input*Tin -> output*Tout
StatelessIf: cond input*Tin -> output*Tout
Case: branch_index input*Tin -> output*Tout
StatelessCase: branch_index input*Tin -> output*Tout
While: input*T -> output*T ; parallel_iterations=10
StatelessWhile: input*T -> output*T ; parallel_iterations=10
PartitionedCall: args*Tin -> output*Tout
StatefulPartitionedCall: args*Tin -> output*Tout
Assert: condition data*T -> ; summarize=3

# Constants, inputs and copies
Const: -> output:dtype
Placeholder: -> output:dtype
PlaceholderV2: -> output:dtype
PlaceholderWithDefault: input -> output:dtype
Identity: input -> output
RefIdentity: input& -> output&
IdentityN: input*T -> output*T
Snapshot: input -> output
StopGradient: input -> output
PreventGradient: input -> output ; message=""
CheckNumerics: tensor -> output ; message=""
ZerosLike: x -> y
OnesLike: x -> y
Fill: dims value -> output
Range: start limit delta -> output:Tidx ; Tidx="int32"
LinSpace: start stop num -> output
OneHot: indices depth on_value off_value -> output ; axis=-1

# Element by element
Abs: x -> y
Acos: x -> y
Acosh: x -> y
Asin: x -> y
Asinh: x -> y
Atan: x -> y
Atanh: x -> y
Ceil: x -> y
Cos: x -> y
Cosh: x -> y
Elu: features -> activations
Erf: x -> y
Erfc: x -> y
Exp: x -> y
Expm1: x -> y
Floor: x -> y
Inv: x -> y
IsFinite: x -> y:bool
IsInf: x -> y:bool
IsNan: x -> y:bool
LeakyRelu: features -> activations ; alpha=0.2
Log: x -> y
Log1p: x -> y
LogicalNot: x -> y:bool
Neg: x -> y
Reciprocal: x -> y
Relu: features -> activations
Relu6: features -> activations
Rint: x -> y
Round: x -> y
Rsqrt: x -> y
Selu: features -> activations
Sigmoid: x -> y
Sign: x -> y
Sin: x -> y
Sinh: x -> y
Softplus: features -> activations
Softsign: features -> activations
Sqrt: x -> y
Square: x -> y
Tan: x -> y
Tanh: x -> y
Invert: x -> y
Add: x y -> z
AddV2: x y -> z
Atan2: y x -> z
BitwiseAnd: x y -> z
BitwiseOr: x y -> z
BitwiseXor: x y -> z
Div: x y -> z
DivNoNan: x y -> z
FloorDiv: x y -> z
FloorMod: x y -> z
LeftShift: x y -> z
Maximum: x y -> z
Minimum: x y -> z
Mod: x y -> z
Mul: x y -> z
MulNoNan: x y -> z
Pow: x y -> z
RealDiv: x y -> z
RightShift: x y -> z
SquaredDifference: x y -> z
Sub: x y -> z
TruncateDiv: x y -> z
TruncateMod: x y -> z
Xdivy: x y -> z
Xlogy: x y -> z
ApproximateEqual: x y -> z:bool ; tolerance=0.00001
Equal: x y -> z:bool ; incompatible_shape_error=true
NotEqual: x y -> z:bool ; incompatible_shape_error=true
Greater: x y -> z:bool
GreaterEqual: x y -> z:bool
Less: x y -> z:bool
LessEqual: x y -> z:bool
LogicalAnd: x y -> z:bool
LogicalOr: x y -> z:bool
Select: condition t e -> output
SelectV2: condition t e -> output
ClipByValue: t clip_value_min clip_value_max -> output
AddN: inputs*N -> sum
AccumulateNV2: inputs*N -> sum
Cast: x -> y:DstT ; Truncate=false
Softmax: logits -> softmax
LogSoftmax: logits -> logsoftmax
BiasAdd: value bias -> output ; data_format="NHWC"
BiasAddV1: value bias -> output
FakeQuantWithMinMaxArgs: inputs -> outputs:float32 ; min=-6.0 max=6.0 num_bits=8 narrow_range=false
FakeQuantWithMinMaxVars: inputs min max -> outputs:float32 ; num_bits=8 narrow_range=false
FakeQuantWithMinMaxVarsPerChannel: inputs min max -> outputs:float32 ; num_bits=8 narrow_range=false

# Gradients
TanhGrad: y dy -> z
SigmoidGrad: y dy -> z
SqrtGrad: y dy -> z
RsqrtGrad: y dy -> z
ReciprocalGrad: y dy -> z
InvGrad: y dy -> z
ReluGrad: gradients features -> backprops
Relu6Grad: gradients features -> backprops
BiasAddGrad: out_backprop -> output ; data_format="NHWC"
BroadcastGradientArgs: s0 s1 -> r0 r1 ; T="int32"

# Along axes
All: input reduction_indices -> output:bool ; keep_dims=false
Any: input reduction_indices -> output:bool ; keep_dims=false
Max: input reduction_indices -> output ; keep_dims=false
Mean: input reduction_indices -> output ; keep_dims=false
Min: input reduction_indices -> output ; keep_dims=false
Prod: input reduction_indices -> output ; keep_dims=false
Sum: input reduction_indices -> output ; keep_dims=false
EuclideanNorm: input reduction_indices -> output ; keep_dims=false
ArgMax: input dimension -> output:output_type ; output_type="int64"
ArgMin: input dimension -> output:output_type ; output_type="int64"
Cumsum: x axis -> out ; exclusive=false reverse=false
Cumprod: x axis -> out ; exclusive=false reverse=false
TopK: input -> values indices:int32 ; sorted=true
TopKV2: input k -> values indices:index_type ; sorted=true index_type="int32"
L2Loss: t -> output
Unique: x -> y idx:out_idx ; out_idx="int32"
UniqueWithCounts: x -> y idx:out_idx count:out_idx ; out_idx="int32"
Where: input -> index:int64

# Where elements are, and how many
Shape: input -> output:out_type ; out_type="int32"
ShapeN: input*N -> output*N:out_type ; out_type="int32"
Size: input -> output:out_type ; out_type="int32"
Rank: input -> output:int32
Reshape: tensor shape -> output
Squeeze: input -> output ; squeeze_dims=[]
ExpandDims: input dim -> output
Transpose: x perm -> y
InvertPermutation: x -> y
BroadcastTo: input shape -> output
BroadcastArgs: s0 s1 -> r0 ; T="int32"
Tile: input multiples -> output
Concat: concat_dim values*N -> output
ConcatV2: values*N axis -> output
ConcatOffset: concat_dim shape*N -> offset*N:shape_type ; shape_type="int32"
Pack: values*N -> output ; axis=0
Unpack: value -> output*num ; axis=0
Split: split_dim value -> output*num_split
SplitV: value size_splits split_dim -> output*num_split
Slice: input begin size -> output
StridedSlice: input begin end strides -> output ; begin_mask=0 end_mask=0 ellipsis_mask=0 new_axis_mask=0 shrink_axis_mask=0
Gather: params indices -> output:Tparams
GatherV2: params indices axis -> output:Tparams ; batch_dims=0
GatherNd: params indices -> output:Tparams
ScatterNd: indices updates shape -> output
TensorScatterUpdate: tensor indices updates -> output
TensorScatterAdd: tensor indices updates -> output
Pad: input paddings -> output
PadV2: input paddings constant_values -> output
MirrorPad: input paddings -> output
ReverseV2: tensor axis -> output
ReverseSequence: input seq_lengths -> output ; batch_dim=0
SpaceToBatchND: input block_shape paddings -> output
BatchToSpaceND: input block_shape crops -> output
SpaceToDepth: input -> output ; data_format="NHWC"
DepthToSpace: input -> output ; data_format="NHWC"
MatrixDiag: diagonal -> output
MatrixDiagV3: diagonal k num_rows num_cols padding_value -> output ; align="RIGHT_LEFT"
MatrixBandPart: input num_lower num_upper -> band
MatrixSetDiagV3: input diagonal k -> output ; align="RIGHT_LEFT"
MatrixDiagPartV3: input k padding_value -> diagonal ; align="RIGHT_LEFT"

# Products
MatMul: a b -> product ; transpose_a=false transpose_b=false
BatchMatMul: x y -> output ; adj_x=false adj_y=false
BatchMatMulV2: x y -> output ; adj_x=false adj_y=false
BatchMatMulV3: x y -> output:Tout ; adj_x=false adj_y=false
Einsum: inputs*N -> output

# Over windows
Conv2D: input filter -> output ; data_format="NHWC" dilations=[1,1,1,1] explicit_paddings=[]
Conv3D: input filter -> output ; data_format="NDHWC" dilations=[1,1,1,1,1]
Conv2DBackpropInput: input_sizes filter out_backprop -> output ; data_format="NHWC" dilations=[1,1,1,1] explicit_paddings=[]
Conv3DBackpropInputV2: input_sizes filter out_backprop -> output ; data_format="NDHWC" dilations=[1,1,1,1,1]
DepthwiseConv2dNative: input filter -> output ; data_format="NHWC" dilations=[1,1,1,1] explicit_paddings=[]
AvgPool: value -> output ; data_format="NHWC"
MaxPool: input -> output ; data_format="NHWC" explicit_paddings=[]
MaxPoolV2: input ksize strides -> output ; data_format="NHWC"
AvgPool3D: input -> output ; data_format="NDHWC"
MaxPool3D: input -> output ; data_format="NDHWC"
FusedBatchNorm: x scale offset mean variance -> y batch_mean batch_variance reserve_space_1 reserve_space_2 ; epsilon=0.0001 data_format="NHWC" is_training=true exponential_avg_factor=1.0
FusedBatchNormV2: x scale offset mean variance -> y batch_mean:U batch_variance:U reserve_space_1:U reserve_space_2:U ; epsilon=0.0001 data_format="NHWC" is_training=true exponential_avg_factor=1.0
FusedBatchNormV3: x scale offset mean variance -> y batch_mean:U batch_variance:U reserve_space_1:U reserve_space_2:U reserve_space_3:U ; epsilon=0.0001 data_format="NHWC" is_training=true exponential_avg_factor=1.0
LRN: input -> output ; depth_radius=5 bias=1.0 alpha=1.0 beta=0.5

# Images and sound
ResizeBilinear: images size -> resized_images:float32 ; align_corners=false half_pixel_centers=false
ResizeNearestNeighbor: images size -> resized_images ; align_corners=false half_pixel_centers=false
CropAndResize: image boxes box_ind crop_size -> crops:float32 ; method="bilinear" extrapolation_value=0.0
NonMaxSuppression: boxes scores max_output_size -> selected_indices:int32 ; iou_threshold=0.5
NonMaxSuppressionV2: boxes scores max_output_size iou_threshold -> selected_indices:int32
NonMaxSuppressionV3: boxes scores max_output_size iou_threshold score_threshold -> selected_indices:int32
NonMaxSuppressionV4: boxes scores max_output_size iou_threshold score_threshold -> selected_indices:int32 valid_outputs:int32 ; pad_to_max_output_size=false
NonMaxSuppressionV5: boxes scores max_output_size iou_threshold score_threshold soft_nms_sigma -> selected_indices:int32 selected_scores valid_outputs:int32 ; pad_to_max_output_size=false
CombinedNonMaxSuppression: boxes scores max_output_size_per_class max_total_size iou_threshold score_threshold -> nmsed_boxes:float32 nmsed_scores:float32 nmsed_classes:float32 valid_detections:int32 ; pad_per_class=false clip_boxes=true
RFFT: input fft_length -> output:Tcomplex ; Tcomplex="complex64"
IRFFT: input fft_length -> output:Treal ; Treal="float32"
FFT: input -> output:Tcomplex ; Tcomplex="complex64"
IFFT: input -> output:Tcomplex ; Tcomplex="complex64"
ComplexAbs: x -> y:Tout ; Tout="float32"
Real: input -> output:Tout ; Tout="float32"
Imag: input -> output:Tout ; Tout="float32"
Complex: real imag -> out:Tout ; Tout="complex64"
Conj: input -> output

# Variables
VariableV2: -> ref& ; container="" shared_name=""
Variable: -> ref& ; container="" shared_name=""
Assign: ref& value -> output_ref& ; validate_shape=true
AssignAdd: ref& value -> output_ref&
AssignSub: ref& value -> output_ref&
IsVariableInitialized: ref& -> is_initialized:bool
VarHandleOp: -> resource:resource ; container="" shared_name=""
ReadVariableOp: resource -> value:dtype
AssignVariableOp: resource value -> ; validate_shape=false
AssignAddVariableOp: resource value ->
AssignSubVariableOp: resource value ->
VarIsInitializedOp: resource -> is_initialized:bool
DestroyResourceOp: resource -> ; ignore_lookup_error=true
ResourceGather: resource indices -> output:dtype ; batch_dims=0
VariableShape: input -> output:out_type ; out_type="int32"

# Stacks, tensor arrays and lists
StackV2: max_size -> handle:resource ; stack_name=""
StackPushV2: handle elem -> output ; swap_memory=false
StackPopV2: handle -> elem:elem_type
StackCloseV2: handle ->
TensorArrayV3: size -> handle:resource flow:float32 ; element_shape=null dynamic_size=false clear_after_read=true identical_element_shapes=false tensor_array_name=""
TensorArrayGradV3: handle flow_in -> grad_handle:resource flow_out:float32
TensorArrayWriteV3: handle index value flow_in -> flow_out:float32
TensorArrayReadV3: handle index flow_in -> value:dtype
TensorArrayGatherV3: handle indices flow_in -> value:dtype ; element_shape=null
TensorArrayScatterV3: handle indices value flow_in -> flow_out:float32
TensorArrayConcatV3: handle flow_in -> value:dtype lengths:int64 ; element_shape_except0=null
TensorArraySplitV3: handle value lengths flow_in -> flow_out:float32
TensorArraySizeV3: handle flow_in -> size:int32
TensorArrayCloseV3: handle ->
EmptyTensorList: element_shape max_num_elements -> handle:variant
TensorListReserve: element_shape num_elements -> handle:variant
TensorListFromTensor: tensor element_shape -> output_handle:variant
TensorListPushBack: input_handle tensor -> output_handle:variant
TensorListPopBack: input_handle element_shape -> output_handle:variant tensor:element_dtype
TensorListGetItem: input_handle index element_shape -> item:element_dtype
TensorListSetItem: input_handle index item -> output_handle:variant ; resize_if_index_out_of_bounds=false
TensorListStack: input_handle element_shape -> tensor:element_dtype ; num_elements=-1
TensorListLength: input_handle -> length:int32
TensorListElementShape: input_handle -> element_shape:shape_type
TensorListResize: input_handle size -> output_handle:variant
TensorListGather: input_handle indices element_shape -> values:element_dtype
TensorListScatterV2: tensor indices element_shape num_elements -> output_handle:variant
TensorListConcatV2: input_handle element_shape leading_dims -> tensor:element_dtype lengths:int64
TensorListSplit: tensor element_shape lengths -> output_handle:variant
"""


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output. ``count`` is the attribute with the number of its values, "" for one
    value; ``type`` an attribute or an element type; ``ref`` marks a reference to a variable."""

    name: str
    count: str = ""
    type: str = "T"
    ref: bool = False

    def times(self, attrs: Mapping[str, Any]) -> int:
        """The number of values. Raises ``ValueError`` if the attributes do not define it."""
        if not self.count:
            return 1
        count = attrs.get(self.count)
        if isinstance(count, list):
            return len(count)
        if isinstance(count, int) and 0 <= count <= _MAX_VALUES:
            return count
        raise ValueError(
            f"attribute {self.count!r} is {count!r}, which is no number of values of {self.name}"
        )

    def types(self, attrs: Mapping[str, Any]) -> Sequence[str | None]:
        """The name of the element type of each value; ``None`` if it is unknown."""
        count = self.times(attrs)
        given = attrs.get(self.count) if self.count else None
        if isinstance(given, list):
            return [dtype if isinstance(dtype, str) else None for dtype in given]
        dtype = attrs.get(self.type, self.type if self.type in _TYPES else None)
        return [dtype if isinstance(dtype, str) else None] * count


@dataclass(frozen=True, slots=True)
class TfSchema:
    """The inputs and outputs of an operation, or of a function of the library."""

    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    defaults: Mapping[str, Any]

    def inputs_of(self, attrs: Mapping[str, Any]) -> list[Argument]:
        """An argument for each input of a node with these attributes."""
        return [argument for argument in self.inputs for _ in range(argument.times(attrs))]

    def outputs_of(self, attrs: Mapping[str, Any]) -> Iterator[tuple[str, int, str | None, bool]]:
        """Of each output: name, number within the name, element type, whether it is a
        reference."""
        for argument in self.outputs:
            for i, dtype in enumerate(argument.types(attrs)):
                yield argument.name, i, dtype, argument.ref


_MAX_VALUES = 65536
_TYPES = frozenset({"bool", "int32", "int64", "float32", "resource", "variant"})


@cache
def schemas() -> Mapping[str, TfSchema]:
    """All operations by name."""
    lines = (line for line in _TABLE.splitlines() if line and not line.startswith("#"))
    return {schema.name: schema for schema in map(_schema, lines)}


def _schema(line: str) -> TfSchema:
    head, _, attributes = line.partition(" ;")
    name, _, arguments = head.partition(":")
    inputs, _, outputs = arguments.partition("->")
    defaults = {}
    for attribute in attributes.split():
        key, _, value = attribute.partition("=")
        defaults[key] = json.loads(value)
    return TfSchema(name, _arguments(inputs), _arguments(outputs), defaults)


def _arguments(words: str) -> tuple[Argument, ...]:
    return tuple([_argument(word) for word in words.split()])


def _argument(word: str) -> Argument:
    ref = word.endswith("&")
    word, _, dtype = word.removesuffix("&").partition(":")
    name, _, count = word.partition("*")
    return Argument(name, count, dtype or "T", ref)
