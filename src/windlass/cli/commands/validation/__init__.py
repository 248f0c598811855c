"""`windlass validate`, on published tables and on this machine."""
