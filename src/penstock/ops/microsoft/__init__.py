"""The operations of the com.microsoft domain."""
