"""What is checked: races, promised orderings, and many calls at random, one folder each."""
