"""What to write in place of the train steps that libraries around MindSpore write by hand, one module a library."""
