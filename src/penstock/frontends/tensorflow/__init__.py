"""The TensorFlow front end: GraphDef and SavedModel."""
