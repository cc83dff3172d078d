"""One folder per system: task, model, data, metrics. Systems do not import each other."""
