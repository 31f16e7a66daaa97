"""Networks of torchvision and timm with random weights, by both of torch's exporters.

Widths and depths are cut where the library has arguments for that, and images are small, so that a
run takes milliseconds. A batch is of 4 images.

The script exporter refuses alexnet and vgg11_bn (adaptive pooling to more places than there are),
vit (fused attention) and eva02 (attention whose ``is_causal`` it traces); dynamo writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.zoo import torch_export
from bench.zoo.store import Recipe
from bench.zoo.torch_export import Network, normal

ROWS = (1, 4)
CLASSES = 10

# Name, image size, and arguments. 10 classes wherever that is an argument.
TORCHVISION: list[tuple[str, int, dict[str, Any]]] = [
    ("alexnet", 64, {}),
    ("convnext_tiny", 32, {}),
    ("densenet121", 32, {"growth_rate": 8, "block_config": (2, 4, 4, 2), "num_init_features": 16}),
    ("efficientnet_b0", 64, {}),
    ("efficientnet_v2_s", 32, {}),
    ("googlenet", 64, {"aux_logits": False, "init_weights": False}),
    ("inception_v3", 128, {"aux_logits": False, "init_weights": False}),
    ("maxvit", 64, {}),
    ("mnasnet0_5", 64, {}),
    ("mobilenet_v2", 64, {"width_mult": 0.35}),
    ("mobilenet_v3_large", 64, {}),
    ("mobilenet_v3_small", 64, {}),
    ("regnet_x_400mf", 64, {}),
    ("regnet_y_400mf", 64, {}),
    ("resnet18", 64, {"width_per_group": 64}),
    ("resnet50", 32, {}),
    ("resnext50_32x4d", 32, {}),
    ("shufflenet_v2_x0_5", 64, {}),
    ("squeezenet1_1", 64, {}),
    ("swin", 64, {}),
    ("swin_v2", 64, {"version": "_v2"}),
    ("vgg11_bn", 32, {}),
    ("vit", 32, {}),
    ("wide_resnet50_2", 32, {}),
]
SEGMENTATION = ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50")
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18")

TIMM: list[tuple[str, int, dict[str, Any]]] = [
    ("beit_base_patch16_224", 32, {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32}),
    ("cait_xxs24_224", 32, {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32}),
    ("coatnet_nano_rw_224", 64, {"img_size": 64}),
    ("convnext_atto", 64, {}),
    ("convnextv2_atto", 64, {}),
    ("cspresnet50", 64, {}),
    ("darknet53", 32, {}),
    ("davit_tiny", 64, {"depths": (1, 1, 1, 1), "embed_dims": (32, 64, 96, 128), "num_heads": (2, 2, 4, 4), "num_classes": 10}),
    ("deit_tiny_patch16_224", 32, {"depth": 3, "img_size": 32}),
    ("dla34", 32, {}),
    ("edgenext_xx_small", 64, {}),
    ("efficientformer_l1", 224, {}),
    ("efficientvit_b0", 64, {}),
    ("eva02_tiny_patch14_224", 28, {"depth": 2, "img_size": 28}),
    ("fastvit_t8", 64, {}),
    ("fbnetc_100", 64, {}),
    ("gernet_s", 64, {}),
    ("ghostnet_050", 64, {}),
    ("hrnet_w18_small", 64, {}),
    ("inception_next_atto", 64, {}),
    ("lcnet_050", 64, {}),
    ("levit_128s", 224, {}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("mobilenetv4_conv_small", 64, {}),
    ("mobileone_s0", 64, {}),
    ("mobilevit_xxs", 64, {}),
    ("mobilevitv2_050", 64, {}),
    ("nfnet_l0", 32, {}),
    ("pit_ti_224", 224, {}),
    ("poolformer_s12", 64, {}),
    ("pvt_v2_b0", 64, {}),
    ("repvgg_a0", 32, {}),
    ("res2net50_26w_4s", 32, {}),
    ("resmlp_12_224", 32, {"img_size": 32}),
    ("resnest14d", 64, {}),
    ("rexnet_100", 64, {}),
    ("seresnet18", 64, {}),
    ("skresnet18", 64, {}),
    ("swin_tiny_patch4_window7_224", 56, {"img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}),
    ("swinv2_tiny_window8_256", 64, {"img_size": 64, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}),
    ("tf_efficientnet_lite0", 64, {}),
    ("tinynet_e", 64, {}),
    ("tiny_vit_5m_224", 224, {}),
    ("vit_tiny_patch16_224", 64, {"depth": 3, "img_size": 64}),
    ("xcit_nano_12_p16_224", 64, {"depth": 2}),
]  # fmt: skip


def recipes(group: str) -> Iterator[Recipe]:
    networks = _torchvision() if group == "torchvision" else _timm()
    yield from torch_export.recipes(networks)


def _torchvision() -> list[Network]:
    networks = [
        Network(name, partial(_vision, name, arguments), [normal(3, size, size)], ROWS)
        for name, size, arguments in TORCHVISION
    ]
    networks += [
        Network(name, partial(_segmentation, name), [normal(3, 64, 64)], (1, 2))
        for name in SEGMENTATION
    ]
    networks += [
        Network(name, partial(_video, name), [normal(3, 8, 32, 32)], (1, 2)) for name in VIDEO
    ]
    return networks


def _vision(name: str, arguments: dict[str, Any]) -> Any:
    from torchvision import models

    if name in ("swin", "swin_v2"):
        from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2

        newer = {"block": SwinTransformerBlockV2} if name == "swin_v2" else {}
        sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
        return settled(SwinTransformer([4, 4], **sizes, **newer, num_classes=CLASSES))
    if name == "vit":
        sizes = {"num_layers": 3, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
        return settled(models.VisionTransformer(32, 8, **sizes, num_classes=CLASSES))
    if name == "maxvit":
        maxvit = models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
        return settled(maxvit)
    if name == "densenet121":
        return settled(models.DenseNet(**arguments, num_classes=CLASSES))
    return settled(getattr(models, name)(num_classes=CLASSES, **arguments))


def _segmentation(name: str) -> Any:
    from torchvision.models import segmentation

    weights: dict[str, Any] = {"weights": None, "weights_backbone": None}
    return settled(getattr(segmentation, name)(**weights, num_classes=CLASSES))


def _video(name: str) -> Any:
    from torchvision.models import video

    return settled(getattr(video, name)(num_classes=CLASSES))


def _timm() -> list[Network]:
    return [
        Network(name, partial(_timm_model, name, arguments), [normal(3, size, size)], ROWS)
        for name, size, arguments in TIMM
    ]


def _timm_model(name: str, arguments: dict[str, Any]) -> Any:
    import timm

    return settled(timm.create_model(name, **{"num_classes": CLASSES, **arguments}))


def settled(model: Any) -> Any:
    """``model`` with random statistics in its batch normalizations, near those of a unit signal.

    With those that it is made with, nothing but zeros and ones, folding them shows nothing.
    """
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.3, 0.6)
    return model
