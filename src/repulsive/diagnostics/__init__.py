"""Are heads diverse, redundant, calibrated? Numbers and tensors here; `report` turns them into pictures."""
