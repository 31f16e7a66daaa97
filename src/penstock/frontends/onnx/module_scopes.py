"""The modules that contain nodes, which torch's exporter records in the metadata of each node."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.core.checkpoints import with_checkpoints
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.messages import NodeProto

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""the key of a list, in Python's notation, of the full names of the modules around a node,
outermost first, and of the operation in torch: ['', 'layers.0', 'layers.0.norm', 'layer_norm']"""

_LIST = re.compile(r"\['[^']*'(, '[^']*')*\]")
_NAME = re.compile(r"'([^']*)'")


def module_scopes(nodes: Iterable[NodeProto]) -> dict[str, str]:
    """Return the scopes of nodes by name, such as "layers.0/norm/layer_norm". Nodes without scopes
    are left out, and scopes that are not in torch's notation."""
    paths: dict[str, str] = {}
    of_text: dict[str, str] = {}
    for node in with_checkpoints(nodes):
        for entry in node.metadata_props:
            if entry.key == NAME_SCOPES and node.name:
                text = decode_text(entry.value)
                if text not in of_text:
                    of_text[text] = _path(text)
                if of_text[text]:
                    paths[decode_text(node.name)] = of_text[text]
    return paths


def _path(text: str) -> str:
    if not _LIST.fullmatch(text):
        return ""
    parts, around = [], ""
    for name in filter(None, _NAME.findall(text)):
        parts.append((name.removeprefix(around + ".") if around else name).replace("/", "."))
        around = name
    return "/".join(parts)
