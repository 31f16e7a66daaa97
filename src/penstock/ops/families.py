"""The module that registers each operation: it is imported when one of them is first looked up.
``tests/ops/test_registry.py`` compares the table with what the modules register."""

from __future__ import annotations

from collections.abc import Mapping

_FAMILIES: Mapping[str, str] = {
    "": """
        onnx.activation: Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu
            Shrink Sigmoid Softplus Softsign SwiGLU Swish ThresholdedRelu
        onnx.arithmetic: Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Clip Cos Cosh Div Erf
            Exp Floor Log Max Mean Min Mod Mul Neg Pow Reciprocal Round Sign Sin Sinh Sqrt
            Sub Sum Tan Tanh
        onnx.arrange: Concat DepthToSpace SpaceToDepth Split Tile
        onnx.attention: Attention
        onnx.cast: BitCast Cast CastLike Constant
        onnx.compare: And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Equal Greater
            GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Where Xor
        onnx.control_flow: If Loop Scan SequenceMap
        onnx.convolution: CausalConvWithState Conv
        onnx.deconvolution: Col2Im ConvTranspose
        onnx.einsum: Einsum
        onnx.fill: ConstantOfShape EyeLike OneHot Range Trilu
        onnx.image: AffineGrid GridSample ImageDecoder NonMaxSuppression
        onnx.index: Compress Gather GatherElements GatherND NonZero ReverseSequence Slice
            Unique
        onnx.linear_attention: LinearAttention
        onnx.loss: NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss
        onnx.matmul: Det Gemm MatMul
        onnx.normalization: BatchNormalization GroupNormalization InstanceNormalization LRN
            LayerNormalization LpNormalization MeanVarianceNormalization RMSNormalization
            SimplifiedLayerNormalization
        onnx.pad: CenterCropPad Pad
        onnx.pooling: AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool
            MaxPool MaxUnpool
        onnx.quantization: DequantizeLinear DynamicQuantizeLinear QuantizeLinear
        onnx.quantized: MatMulInteger QLinearMatMul
        onnx.quantized_conv: ConvInteger QLinearConv
        onnx.random: Bernoulli Dropout Multinomial RandomNormal RandomNormalLike
            RandomUniform RandomUniformLike
        onnx.recurrent: GRU LSTM RNN
        onnx.reduce: CumProd CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
            ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
        onnx.regions: DeformConv MaxRoiPool RoiAlign
        onnx.resize: Resize
        onnx.rotary: RotaryEmbedding
        onnx.scatter: Scatter ScatterElements ScatterND TensorScatter
        onnx.search: ArgMax ArgMin TopK
        onnx.sequence: ConcatFromSequence Optional OptionalGetElement OptionalHasElement
            SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
            SequenceLength SplitToSequence
        onnx.shape: Expand Flatten Identity Reshape Shape Size Squeeze Transpose Unsqueeze
        onnx.signal: BlackmanWindow DFT HammingWindow HannWindow MelWeightMatrix STFT
        onnx.softmax: Hardmax LogSoftmax Softmax
        onnx.text: RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer
    """,
    "com.microsoft": """
        microsoft.arrays: BifurcationDetector CropAndResize DynamicTimeWarping Inverse
            MaxpoolWithMask NGramHashMapping NGramRepeatBlock UnfoldTensor
            VarlenNGramHashMapping WordConvEmbedding
        microsoft.attention: Attention DecoderMaskedMultiHeadAttention MultiHeadAttention
        microsoft.cached_attention: GroupQueryAttention SparseAttention
        microsoft.experts: MoE QMoE
        microsoft.quantized_lstm: DynamicQuantizeLSTM
        microsoft.quantized_weights: GatherBlockQuantized MatMulNBits
        microsoft.text: MurmurHash3 Tokenizer
        onnx.quantization: DequantizeLinear QuantizeLinear
        onnx.quantized: QGemm
        onnx.quantized_conv: QLinearConv
        onnx.rotary: GemmaRotaryEmbedding RotaryEmbedding
    """,
    "ai.onnx.ml": """
        onnx_ml.features: ArrayFeatureExtractor Binarizer CastMap CategoryMapper
            DictVectorizer FeatureVectorizer Imputer LabelEncoder Normalizer OneHotEncoder
            Scaler ZipMap
        onnx_ml.models: LinearClassifier LinearRegressor SVMClassifier SVMRegressor
        onnx_ml.trees: TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor
    """,
    "tensorflow": """
        tensorflow.arrays: All Any BroadcastArgs ConcatOffset ConcatV2 Const EnsureShape Fill
            GatherV2 IdentityN InvertPermutation LinSpace MatrixTranspose NonNegative OneHot
            Pack Rank ReverseV2 Roll ScatterNd Select Shape ShapeN Size Slice Split SplitV
            StridedSlice StridedSliceGrad TensorScatterMax TensorScatterMin TensorScatterSub
            Transpose Unpack Where
        tensorflow.blocks: BatchToSpaceND DepthToSpace FusedBatchNorm FusedBatchNormGrad
            MirrorPad SpaceToBatchND SpaceToDepth
        tensorflow.colors: AdjustHue AdjustSaturation HSVToRGB RGBToHSV
        tensorflow.counting: DenseBincount InTopKV2 LowerBound RaggedBincount Unique
            UniqueWithCounts UpperBound
        tensorflow.control_flow: Call ControlTrigger Enter Exit LoopCond Merge NextIteration
            NoOp RefEnter RefExit RefMerge RefNextIteration RefSwitch Switch _SwitchN
        tensorflow.crosses: SparseCross
        tensorflow.images: CombinedNonMaxSuppression CropAndResize NonMaxSuppression
        tensorflow.incomplete: Betainc Igamma Igammac
        tensorflow.lists: AddVariants EmptyTensorList OptionalFromValue OptionalGetValue
            OptionalHasValue OptionalNone TensorListConcatV2 TensorListElementShape
            TensorListFromTensor TensorListGather TensorListGetItem TensorListLength
            TensorListPopBack TensorListPushBack TensorListReserve TensorListResize
            TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack
            ZerosLikeVariant
        tensorflow.math: ApproximateEqual Assert Atan2 BiasAddGrad BranchIndex
            BroadcastGradientArgs CheckNumerics ComplexAbs Conj Cross Div DivNoNan EluGrad
            Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
            FakeQuantWithMinMaxVarsPerChannel FloorDiv FloorMod Imag InvGrad IsFinite L2Loss
            LeakyReluGrad LeftShift Log1p MulNoNan NotEqual OnesLike Real ReciprocalGrad
            Relu6Grad ReluGrad RightShift Rint Rsqrt RsqrtGrad SeluGrad SigmoidGrad
            SoftmaxCrossEntropyWithLogits SoftplusGrad SoftsignGrad
            SparseSoftmaxCrossEntropyWithLogits SqrtGrad SquaredDifference TanhGrad ToBool
            TruncateDiv TruncateMod Xdivy Xlogy ZerosLike
        tensorflow.matrices: MatrixBandPart MatrixDiag MatrixDiagPartV3 MatrixDiagV3
            MatrixSetDiagV3
        tensorflow.patches: ExtractImagePatches
        tensorflow.ragged: RaggedTensorToTensor StringNGrams UnicodeDecode UnicodeEncode
        tensorflow.resize: ResizeArea ResizeBicubic
        tensorflow.segments: Segment
        tensorflow.signal: Complex FFT IFFT IRFFT RFFT
        tensorflow.special: Digamma Erfinv Lgamma Ndtri
        tensorflow.state: Assign AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp
            AssignVariableOp DestroyResourceOp IsVariableInitialized ReadVariableOp
            ResourceApplyAdam ResourceApplyGradientDescent ResourceApplyKerasMomentum
            ResourceApplyMomentum ResourceApplyRMSProp VarHandleOp VarIsInitializedOp
            VariableShape VariableV2
        tensorflow.tensor_arrays: StackCloseV2 StackPopV2 StackPushV2 StackV2
            TensorArrayCloseV3 TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3
            TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3 TensorArraySplitV3
            TensorArrayV3 TensorArrayWriteV3
        tensorflow.text: AsString RegexReplace StringFormat StringJoin StringLength
            StringLower StringSplitV2 StringStrip StringToHashBucketFast
            StringToHashBucketStrong StringToNumber StringUpper Substr
        tensorflow.windows: AvgPoolGrad Conv2DBackpropInput Conv3DBackpropInputV2
            ConvBackpropFilter MaxPoolGrad
    """,
    "penstock": """
        penstock.collective: AllReduce Broadcast
    """,
    "tflite": """
        tflite.arrays: Bucketize CodeTable ComplexMul DynamicUpdateSlice IntegerArithmetic
            NumericVerify Rfft2d Segment SparseToDense ToComplex ViewAs
        tflite.detection: TFLite_Detection_PostProcess
        tflite.hashing: LshProjection
        tflite.layers: Lstm IntegerLstm IntegerSvdf DynamicRangeDense
        tflite.signal: AudioSpectrogram Mfcc aeq.hadamard_rotation
        tflite.tables: EmbeddingLookupSparse HashtableFind HashtableLookup RngBitGenerator
            SkipGram
        tflite.windows: ReduceWindow SliceGather SliceScatter Spread
    """,
}
"""The names of operations behind the module that registers them, by their domain"""


def _modules() -> Mapping[tuple[str, str], str]:
    table = {}
    for domain, text in _FAMILIES.items():
        for word in text.split():
            if word.endswith(":"):
                module = f"penstock.ops.{word[:-1]}"
            else:
                table[domain, word] = module
    return table


MODULES = _modules()
"""The module that registers an operation, by its domain and name"""
