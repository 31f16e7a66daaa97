"""Front ends: file formats to graphs. Only the modules of one format import its parser."""
