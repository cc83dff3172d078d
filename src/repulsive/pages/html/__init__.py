"""HTML and SVG fragments: data classes in, escaped markup out. Style sheet and scripts are in this folder too."""
