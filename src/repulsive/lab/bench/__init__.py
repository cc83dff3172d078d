"""What repulsion costs, measured on the machine at hand. Numbers first; `table` and `plots` draw them."""
