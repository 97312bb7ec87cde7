"""The parts of examples/train_lm.py, for programs that train in other ways."""
