"""The parts that front ends share.

A front end turns one format into a ``Model``. It takes from here:

* ``diagnostics``: ``Diagnostics`` collects what is wrong with a file and raises all of it at once;
  ``NodeError``, ``InexpressibleError`` and ``TensorError`` are what the code that reads one node or
  one tensor raises.
* ``builder``: ``NodeBuilder`` is one node of the file for the rule that converts it: the rule asks
  it for constants, types and attributes, and emits nodes through it.
* ``inferred_types``: ``InferredTypes`` infers the types of values while a graph is being built.
* ``model_files``: opens the file that a user names, or one inside the model's folder.
* ``encoding``: varints, text and arrays out of bytes.

``docs/adding-a-front-end.md`` reads a small format with them.
"""
