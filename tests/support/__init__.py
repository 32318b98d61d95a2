"""What tests share: their inputs, the judges of results, and programs that run on their own."""
