"""An exact step: buckets, hooks, backward; knows no way of training."""
