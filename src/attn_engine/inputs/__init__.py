"""What comes in, for every function: arrays, options, the checked call."""
