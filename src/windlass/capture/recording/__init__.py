"""One pass of a layer, recorded on fake tensors at several sizes and fitted."""
