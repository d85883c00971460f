"""`outrider bench speculation`: the speed of every drafter, side by side."""
