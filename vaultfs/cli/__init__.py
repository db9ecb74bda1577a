"""The command line: one file for each command, nothing imported before it is needed."""
