"""SVG and PDF files for papers, drawn by Matplotlib from the same data classes as the pages."""
