"""What a run needs of a machine, estimated from sizes before anything is read, trained or built."""
