"""The pictures of a report: plain data in, one SVG as text out. Colours are classes, which the page's style sheet knows."""
