"""What a run needs of a machine, told by sizes alone, before anything is read, trained or built."""
