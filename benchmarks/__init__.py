"""What each transition costs, side by side with other allocators in one run."""
