"""Types that all packages share; imports no torch at run time."""
