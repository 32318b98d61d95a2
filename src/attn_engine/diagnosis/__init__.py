"""What is wrong with a call, and the code that mends it."""
