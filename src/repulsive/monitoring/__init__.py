"""Monitor the heads of any model during training: measure, warn, log, and draw a live page and a film.

measurement.py  data classes: what is measured in one pass, as plain numbers
recording.py    the hooks that measure one forward pass
problems.py     thresholds, and warnings in plain English
monitor.py      `HeadMonitor`: when to measure; history and state
history.py      measurements of a whole training, thinned to a bounded number
embedding.py    positions of heads in a plane, aligned over time
"""
