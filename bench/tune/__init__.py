"""What `auto` goes by: the model, the user's tuning cache, and the times that come with the library."""
