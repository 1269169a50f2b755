"""Training the drafter: the training-time-test loss, the loop, checkpoints that resume exactly."""
