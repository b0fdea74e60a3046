"""Systems that decode a test set, behind one interface: a checkpoint under a schedule, and confidence exits."""
