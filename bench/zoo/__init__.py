"""A zoo of models as exporters write them: where is Penstock wrong, refuses, or is slow?

Generators (``scikit``, ``boosting``, ``torch_modules``, ...) have recipes, which ``store`` turns
into files in the cache folder: models, feeds, and the answers of the libraries that they come
from. They run in an environment of their own (``bench-zoo``), since
Penstock's needs none of these libraries. ``check`` then runs every model on Penstock and ONNX
Runtime, each in a process of its own (``worker``), and ``report`` writes ``bench/zoo.md``.
"""
