"""What adapters are read from and written as: folders of PEFT, and the weights of their base."""
