"""What tests run on ranks: the processes themselves (`worker`) and the functions that they run."""
