"""Hugging Face families that look at images: classifiers, detectors, segmenters, depth, masked autoencoders, video."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.family import (
    HEADS,
    LABELS,
    LAYERS,
    PIXELS,
    ROWS,
    WIDTH,
    Batch,
    Family,
    classes,
    classified_images,
    classified_images_of,
    images,
)
from torch import nn

VIT: dict[str, Any] = dict(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH, image_size=PIXELS,
    patch_size=8, num_labels=LABELS,
)  # fmt: skip
SWIN: dict[str, Any] = dict(
    image_size=PIXELS, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=LABELS
)
STAGES: dict[str, Any] = dict(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=LABELS)
RESNET: dict[str, Any] = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
MOBILENET: dict[str, Any] = dict(
    image_size=64, depth_multiplier=0.1, classifier_dropout_prob=0.2, initializer_range=0.2, num_labels=LABELS
)
QUERIES, OBJECTS, FRAMES, CODES = 6, 3, 2, 37


def classifier(name: str, sizes: dict[str, Any], batch: Any = classified_images) -> Family:
    return Family(f"{name}Config", sizes, f"{name}ForImageClassification", batch)


def boxes(source: torch.Generator) -> Batch:
    """Objects in images: a class and a box each."""
    return {
        "pixel_values": images(source), "classes": classes(source, ROWS, OBJECTS),
        "boxes": torch.rand(ROWS, OBJECTS, 4, generator=source),
    }  # fmt: skip


def detection_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Query k answers for object k, the rest for nothing: the matching, which is a program on the host, is left out."""
    found = model(pixel_values=batch["pixel_values"])
    targets = torch.full(found.logits.shape[:2], found.logits.shape[-1] - 1)
    targets[:, :OBJECTS] = batch["classes"]
    by_class = F.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
    return by_class + F.l1_loss(found.pred_boxes[:, :OBJECTS], batch["boxes"])


def segments(source: torch.Generator) -> Batch:
    labels = classes(source, ROWS, PIXELS, PIXELS)
    labels[:, :2] = 255  # what the model is told to ignore
    return {"pixel_values": images(source), "labels": labels}


def depths(source: torch.Generator) -> Batch:
    return {"pixel_values": images(source), "depth": torch.rand(ROWS, PIXELS, PIXELS, generator=source)}


def depth_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = model(pixel_values=batch["pixel_values"]).predicted_depth
    return F.l1_loss(F.interpolate(found[:, None], size=(PIXELS, PIXELS), mode="bilinear")[:, 0], batch["depth"])


def plain_images(source: torch.Generator) -> Batch:
    """Nothing but images: the model hides patches and draws them again. Which ones is decided by the noise."""
    return {"pixel_values": images(source), "noise": torch.rand(ROWS, (PIXELS // 8) ** 2, generator=source)}


def hidden_patches(source: torch.Generator) -> Batch:
    """Half of each row's patches hidden, to be named by their codes."""
    patches = (PIXELS // 8) ** 2
    order = torch.rand(ROWS, patches, generator=source).argsort(dim=1)
    codes = torch.randint(0, CODES, (ROWS * patches // 2,), generator=source)
    return {"pixel_values": images(source), "bool_masked_pos": order < patches // 2, "labels": codes}


def classified_video(source: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(ROWS, FRAMES, 3, PIXELS, PIXELS, generator=source), "labels": classes(source)}


def upscaled(source: torch.Generator) -> Batch:
    return {"pixel_values": images(source, 16), "target": images(source, 32)}


def upscale_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.l1_loss(model(pixel_values=batch["pixel_values"]).reconstruction, batch["target"])


CLASSIFIERS: dict[str, Family] = {
    "vit": classifier("ViT", VIT),
    "deit": classifier("DeiT", VIT),
    "beit": classifier("Beit", VIT | dict(use_relative_position_bias=True)),
    "data2vec_vision": classifier("Data2VecVision", VIT),
    "dinov2": classifier("Dinov2", VIT),
    "ijepa": classifier("IJepa", VIT),
    "vit_msn": classifier("ViTMSN", VIT),
    "swin": classifier("Swin", SWIN),
    "swinv2": classifier("Swinv2", SWIN),
    "focalnet": classifier("FocalNet", dict(
        image_size=PIXELS, patch_size=2, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1], focal_levels=[2, 2],
        focal_windows=[3, 3], num_labels=LABELS,
    )),
    "hiera": classifier("Hiera", dict(
        image_size=[PIXELS, PIXELS], patch_size=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], embed_dim=8,
        depths=[1, 1], num_heads=[1, 2], masked_unit_size=[4, 4], query_stride=[2, 2], num_query_pool=1,
        num_labels=LABELS,
    )),
    "convnext": classifier("ConvNext", STAGES),
    "convnextv2": classifier("ConvNextV2", STAGES),
    "resnet": classifier("ResNet", RESNET | dict(num_labels=LABELS)),
    "regnet": classifier("RegNet", RESNET | dict(layer_type="y", groups_width=8, num_labels=LABELS)),
    "bit": classifier("Bit", RESNET | dict(layer_type="preactivation", num_groups=4, num_labels=LABELS)),
    "mobilevit": classifier("MobileViT", dict(
        image_size=64, hidden_sizes=[16, 20, 24], neck_hidden_sizes=[8, 8, 16, 16, 20, 24, 32], num_labels=LABELS,
        initializer_range=0.1,
    ), classified_images_of(64)),
    "mobilevitv2": classifier("MobileViTV2", dict(
        image_size=64, width_multiplier=0.25, n_attn_blocks=[1, 1, 1], base_attn_unit_dims=[32, 64, 64],
        initializer_range=0.1, num_labels=LABELS,
    ), classified_images_of(64)),
    "mobilenet_v1": classifier("MobileNetV1", MOBILENET, classified_images_of(64)),
    "mobilenet_v2": classifier("MobileNetV2", MOBILENET, classified_images_of(64)),
    "efficientnet": classifier("EfficientNet", dict(
        image_size=PIXELS, width_coefficient=0.2, depth_coefficient=0.2, hidden_dim=256, num_labels=LABELS,
        drop_connect_rate=0.0, initializer_range=0.1,
    )),
    "cvt": classifier("Cvt", dict(
        embed_dim=[8, 16], depth=[1, 2], num_heads=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1],
        mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.1],
        qkv_bias=[True, True], cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3],
        padding_kv=[1, 1], stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1], num_labels=LABELS,
    )),
    "levit": classifier("Levit", dict(
        image_size=64, hidden_sizes=[16, 16, 16], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
        num_labels=LABELS,
    ), classified_images_of(64)),
    "poolformer": classifier("PoolFormer", dict(
        hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], mlp_ratio=2.0, num_labels=LABELS
    )),
    "pvt": classifier("Pvt", dict(
        image_size=PIXELS, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2],
        mlp_ratios=[2, 2, 2, 2], num_labels=LABELS,
    )),
    "swiftformer": classifier("SwiftFormer", dict(
        image_size=PIXELS, depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16], num_labels=LABELS
    )),
}  # fmt: skip

DENSE: dict[str, Family] = {
    "segformer": Family("SegformerConfig", dict(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=LABELS,
    ), "SegformerForSemanticSegmentation", segments),
    "dpt": Family("DPTConfig", VIT | dict(
        num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5], readout_type="project", is_hybrid=False,
    ), "DPTForDepthEstimation", depths, depth_loss),
    "glpn": Family("GLPNConfig", dict(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
    ), "GLPNForDepthEstimation", depths, depth_loss),
    "upernet": Family("UperNetConfig", dict(
        hidden_size=16, pool_scales=[1, 2], use_auxiliary_head=True, auxiliary_in_channels=16, auxiliary_channels=8,
        num_labels=LABELS,
    ), "UperNetForSemanticSegmentation", segments, parts={
        "backbone_config": ("ConvNextConfig", dict(
            hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
        )),
    }),
    "detr": Family("DetrConfig", dict(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=QUERIES, d_model=WIDTH,
        encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_labels=LABELS,
    ), "DetrForObjectDetection", boxes, detection_loss, parts={
        "backbone_config": ("ResNetConfig", RESNET | dict(out_features=["stage2"])),
    }),
    "conditional_detr": Family("ConditionalDetrConfig", dict(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=QUERIES, d_model=WIDTH,
        encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_labels=LABELS,
    ), "ConditionalDetrForObjectDetection", boxes, detection_loss, parts={
        "backbone_config": ("ResNetConfig", RESNET | dict(out_features=["stage2"])),
    }),
    "yolos": Family("YolosConfig", VIT | dict(
        image_size=[PIXELS, PIXELS], num_detection_tokens=QUERIES, use_mid_position_embeddings=True,
    ), "YolosForObjectDetection", boxes, detection_loss),
    "vit_mae": Family("ViTMAEConfig", VIT | dict(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32,
    ), "ViTMAEForPreTraining", plain_images),
    "swin2sr": Family("Swin2SRConfig", dict(
        image_size=16, patch_size=1, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2,
    ), "Swin2SRForImageSuperResolution", upscaled, upscale_loss),
    "beit_masked": Family("BeitConfig", VIT | dict(
        vocab_size=CODES, use_mask_token=True
    ), "BeitForMaskedImageModeling", hidden_patches),
    "videomae": Family("VideoMAEConfig", VIT | dict(
        num_frames=FRAMES, tubelet_size=2
    ), "VideoMAEForVideoClassification", classified_video),
    "vivit": Family("VivitConfig", VIT | dict(
        num_frames=FRAMES, tubelet_size=[2, 8, 8]
    ), "VivitForVideoClassification", classified_video),
    "timesformer": Family("TimesformerConfig", VIT | dict(
        num_frames=FRAMES
    ), "TimesformerForVideoClassification", classified_video),
}  # fmt: skip

IMAGES: dict[str, Family] = CLASSIFIERS | DENSE
