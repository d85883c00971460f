"""`outrider bench compare`: two results side by side."""
