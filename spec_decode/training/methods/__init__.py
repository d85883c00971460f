"""Draft heads and draft weights that can be trained: one module a kind, behind `base.TrainedDrafter`."""
