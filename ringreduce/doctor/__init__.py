"""What this machine (`machine`) and the network between hosts (`peers`) let ringreduce do."""
