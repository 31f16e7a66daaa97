"""The common parts of front ends.

A front end converts one format to a ``Model``. It uses from here:

* ``diagnostics``: ``Diagnostics`` collects what is wrong with a file and raises all of it at once;
  code that reads one node or one tensor raises ``NodeError``, ``InexpressibleError`` or
  ``TensorError``.
* ``builder``: ``NodeBuilder`` is one node of the file for the rule that converts it: the rule reads
  constants, types and attributes from it, and emits nodes through it.
* ``inferred_types``: ``InferredTypes`` infers the types of values while a graph is being built.
* ``model_files``: opens the file that a user names, or one inside the model's folder.
* ``encoding``: decodes varints, text and arrays from bytes.

``docs/adding-a-front-end.md`` reads a small format with them.
"""
