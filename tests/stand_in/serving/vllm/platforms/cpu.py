"""The platform of CPUs, which names the class of its communicators."""


class CpuPlatform:
    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
