"""Other runtimes beside Penstock: how they run a model, how long they take, what they answer."""
