"""Files of an adapter: found, checked, understood, and read into the form in which they are served."""
