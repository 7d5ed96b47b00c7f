"""From `attach` to `detach`: picks the way to train and owns its parts."""
