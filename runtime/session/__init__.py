"""Sessions, from `attach` to `detach`: pick the way to train and own its parts."""
