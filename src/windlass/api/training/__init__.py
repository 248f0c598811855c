"""Starting, running and resuming training, on one device or on several ranks of this host."""
