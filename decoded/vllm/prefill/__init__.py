"""The P side: each worker pushes its rank's layers to D as they are computed."""
