"""Monitor the heads of any model during training: measure, warn, log, and draw a live page and a film.

monitor.py          `HeadMonitor`: when to measure; history and state
monitored_heads.py  the heads to measure
training_pass.py    which training pass is measured, and the hooks around it
recording.py        the hooks that measure one forward pass
measurement.py      data classes: what is measured in one pass, as plain numbers
problems.py         thresholds, and warnings in plain English
history.py          measurements of a whole training, thinned to a bounded number
live_page.py        the content of the live page
film_layers.py      the layers and frames of the film
embedding.py        positions of heads in a plane, aligned over time
"""
