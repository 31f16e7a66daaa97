"""Sessions whose graphs run on several processes, which Ray starts on one machine or many."""
