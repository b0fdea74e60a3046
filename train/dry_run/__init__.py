"""A run that is rehearsed before it starts: the memory and the time that it takes."""
